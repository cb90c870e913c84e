"""Engine, Stream and the life cycle of a request."""
