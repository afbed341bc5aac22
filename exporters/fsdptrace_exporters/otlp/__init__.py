"""OpenTelemetry: traces, metrics and logs over OTLP, and as OTLP JSON in files."""
