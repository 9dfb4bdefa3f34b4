"""What the API is: its schemas, its operations, and the OpenAPI and AsyncAPI documents made of them."""
