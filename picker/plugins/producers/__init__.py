"""Write findings about request and candidates before scheduling (`DataProducer`)."""
