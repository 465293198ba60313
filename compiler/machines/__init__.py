"""The machines that a plan is for: their peaks, links and memory."""
