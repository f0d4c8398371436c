"""Training configuration: models, clusters, units, rates, parallel sizes."""
