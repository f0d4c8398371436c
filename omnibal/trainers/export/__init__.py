"""Plans written as the files, flags and commands of other trainers."""
