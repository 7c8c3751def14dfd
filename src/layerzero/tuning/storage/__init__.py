"""What is kept between processes: times in SQLite, verdicts and markers in a folder."""
