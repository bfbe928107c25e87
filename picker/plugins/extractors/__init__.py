"""Read pages about endpoints (`scrape.sources.Extractor`, `EndpointExtractor`)."""
