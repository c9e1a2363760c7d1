"""What will run, decided once and written down."""
