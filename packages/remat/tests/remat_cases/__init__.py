"""Cases of the tests of this package."""
