"""Joint: process groups of several jobs, whose processes know of each other only where they meet.

In reading order:

- `steps`: what a process does to notes of a store, carried out by somebody else;
- `rendezvous`: processes find each other in a store, and forget what it has of them;
- `meeting`: the store where they do, by an address or as it was given;
- `connect`: a group of those who have met, and its end.
"""
