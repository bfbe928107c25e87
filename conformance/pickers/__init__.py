"""What is tested: a picker started by a command line, or one that runs already."""
