use crate::ConfigError;

/// Refuses the URLs that a client would misread. No error shows the URL, since it may hold a password.
pub(super) fn validate(url: &str) -> Result<(), ConfigError> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(not_redis());
    };

    let (base, topology) = match scheme.split_once(['-', '+']) {
        Some((base, topology)) => (base, Some(topology)),
        None => (scheme, None),
    };
    let tls = match base {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => return Err(not_redis()),
    };
    match topology {
        None | Some("sentinel") => {}
        Some("unix") if cfg!(feature = "fred-unix-sockets") => {}
        Some("unix") => return Err(ConfigError::new("a Unix socket needs the feature `fred-unix-sockets`")),
        Some("cluster") => {
            return Err(ConfigError::new(
                "a cluster needs the feature `redis-rs`, which is to come; until then give one server or Sentinel",
            ));
        }
        Some(_) => return Err(not_redis()),
    }

    // Without TLS built in, fred would connect in plain text.
    if tls && !cfg!(feature = "fred-rustls") {
        return Err(ConfigError::new(format!(
            "`{scheme}://` asks for TLS: turn on the feature `fred-rustls`"
        )));
    }

    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if let Some((user, _)) = authority.rsplit_once('@')
        && !user.contains(':')
    {
        return Err(ConfigError::new(
            "the URL has a user and no password; a password alone is written `redis://:password@host`",
        ));
    }
    if rest
        .split_once('?')
        .is_some_and(|(_, query)| query.split('&').any(|pair| pair.starts_with("db=")))
    {
        return Err(ConfigError::new(
            "the database is the path of the URL: `redis://host:6379/3`, not `?db=3`",
        ));
    }
    Ok(())
}

fn not_redis() -> ConfigError {
    ConfigError::new("this is not the URL of a Redis; one looks like `redis://:password@127.0.0.1:6379/0`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_a_client_would_misread_is_refused_with_the_fix() {
        for (url, fix) in [
            ("", "redis://"),
            ("127.0.0.1:6379", "redis://"),
            ("http://127.0.0.1:6379", "redis://"),
            ("redis-ring://127.0.0.1", "redis://"),
            ("redis://secret@127.0.0.1", "`redis://:password@host`"),
            ("redis://127.0.0.1/?db=3", "redis://host:6379/3"),
            ("redis-cluster://127.0.0.1", "feature `redis-rs`"),
        ] {
            let error = validate(url).unwrap_err().to_string();
            assert!(error.contains(fix), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn tls_without_tls_built_in_is_refused() {
        for url in [
            "rediss://127.0.0.1",
            "valkeys://127.0.0.1",
            "rediss-sentinel://127.0.0.1",
        ] {
            match validate(url) {
                Ok(()) if cfg!(feature = "fred-rustls") => {}
                Ok(()) => panic!("{url} passes"),
                Err(error) => assert!(error.to_string().contains("feature `fred-rustls`"), "{error}"),
            }
        }
    }

    #[test]
    fn the_usual_urls_pass() {
        for url in [
            "redis://127.0.0.1",
            "redis://user:p%40ss@[::1]:6379/3",
            "valkey://:secret@redis.internal",
            "redis-sentinel://10.0.0.1:26379?sentinelServiceName=main&node=10.0.0.2:26379",
        ] {
            assert!(validate(url).is_ok(), "{url}");
        }
    }
}
