"""What starts a job: scripts and manifests."""
