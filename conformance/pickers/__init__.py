"""The picker under test: started by a command line, or one that runs already."""
