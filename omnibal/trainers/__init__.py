"""Other trainers: plans exported to them, and their launch lines checked and predicted."""
