"""What a plan costs: parameters and bytes per rank, bytes on the wire."""
