"""The only code that knows a private PyTorch name. Everything after it reads events."""
