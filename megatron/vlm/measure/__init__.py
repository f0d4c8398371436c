"""The trainer's own parts timed: `omnibal profile`, and one stage of a plan alone on a device."""
