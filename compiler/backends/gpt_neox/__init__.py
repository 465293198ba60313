"""gpt-neox: its configuration files and a plan."""
