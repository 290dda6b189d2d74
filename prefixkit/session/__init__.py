"""Sessions and search nodes, which users hold from call to call, and the checks of users' arguments."""
