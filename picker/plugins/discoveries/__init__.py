"""Where the endpoints are listed; settings only."""
