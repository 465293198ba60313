"""Who holds what: ranks and groups, weight slices, token ranges, optimizer shards, stages."""
