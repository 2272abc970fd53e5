"""Sources in, artifact directory out; the only place that imports torch for tracing."""
