"""`kvbm demo`: the whole line once on embedded servers, with two small engines that compute."""
