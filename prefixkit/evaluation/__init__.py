"""An application on prefixkit: problems, the judge of programs, campaigns and their report."""
