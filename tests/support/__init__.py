"""What the tests share: a fake process group, ranks as processes, readable traces, models and programs."""
