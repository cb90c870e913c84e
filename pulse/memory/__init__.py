"""Request-level bookkeeping: byte sizes and tiers."""
