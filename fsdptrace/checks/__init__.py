"""Rules: one per file, a registry, the policy. They read events and nothing else, so that they run over files as well."""
