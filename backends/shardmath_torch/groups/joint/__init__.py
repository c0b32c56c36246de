"""Joint: process groups of several jobs, whose processes share nothing but a store.

In reading order:

- `steps`: operations on a store's notes as values, carried out by a driver;
- `rendezvous`: the protocol with which processes find each other in a store;
- `meeting`: the store for that, at an address or given by the caller;
- `connect`: making and ending the group.
"""
