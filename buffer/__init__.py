"""The experience buffer: tables of rows in Redis, claimed by stage."""
