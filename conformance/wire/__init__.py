"""What a gateway says to a picker, said by the suite itself: ext_proc streams and health checks."""
