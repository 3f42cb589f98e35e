"""Which of the paper's claims hold: the studies, the runs behind them and the tables made from those."""
