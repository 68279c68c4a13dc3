"""Description of the HTTP API (OpenAPI 3.1): schemas, parameters and responses of the routes. Pure."""
