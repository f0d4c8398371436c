"""What is trained and on what: configurations, units, rates, parallel sizes."""
