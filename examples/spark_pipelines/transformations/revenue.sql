-- Revenue per city, from the streaming table of orders.py.
CREATE MATERIALIZED VIEW revenue AS
SELECT city, count(*) AS orders, round(sum(total), 2) AS total
FROM orders
GROUP BY city;
