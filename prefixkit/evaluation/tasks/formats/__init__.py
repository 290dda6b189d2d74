"""The forms of problems in files, one module each: ``read`` makes a problem of a record."""
