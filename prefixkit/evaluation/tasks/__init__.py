"""Problems that models are asked to solve with programs: where they come from, and how candidates are to be judged."""
