"""How tensor parallelism cuts the parameters that a derived table names."""
