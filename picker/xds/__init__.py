"""Endpoints for the Envoy beside the picker: `envoy.service.endpoint.v3`, served."""
