"""What prefixkit costs, against floors and rivals; see README.md."""
