"""meshpar under other libraries' trainers: one file a library; nothing else imports them."""
