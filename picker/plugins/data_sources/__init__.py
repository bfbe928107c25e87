"""Where pages about endpoints are (`scrape.sources.DataSource`); settings only."""
