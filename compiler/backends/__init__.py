"""What a plan is written as, one module per consumer."""
