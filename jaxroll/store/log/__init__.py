"""The store's log on disk: SQLite database, migration, recovery and replay."""
