"""Tree attention against its floor, against other systems in the same run, and against recorded ones."""
