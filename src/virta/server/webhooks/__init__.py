"""Webhooks: subscriptions with a sink, and deliveries to it."""
