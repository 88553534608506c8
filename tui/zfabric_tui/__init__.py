"""The operator's eye on a fabric: one feed, one snapshot a tick, screens that only draw."""
