"""The one codec: values of the core as JSON, and back; msgspec reads the forms off the classes."""
