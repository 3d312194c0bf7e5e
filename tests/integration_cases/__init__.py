"""Cases of the integration tests."""
