use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::ConfigError;

pub(super) fn parse(url: String) -> Result<ConnectionInfo, ConfigError> {
    url.into_connection_info()
        .map_err(|error| ConfigError::because("this Redis URL cannot be used", error))
}

/// The same server, with `TCP_NODELAY` and RESP3, in which redis-rs reports a lost connection at once.
pub(super) fn for_limiter(server: &ConnectionInfo) -> ConnectionInfo {
    let server = without_library_name(server);
    let settings = server.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let tcp = server.tcp_settings().clone().set_nodelay(true);
    server.set_redis_settings(settings).set_tcp_settings(tcp)
}

/// The same server, without `CLIENT SETINFO`, for which the user may have no permission.
pub(super) fn without_library_name(server: &ConnectionInfo) -> ConnectionInfo {
    let settings = server.redis_settings().clone().set_skip_set_lib_name();
    server.clone().set_redis_settings(settings)
}

/// The server at an address, with the settings of the template.
pub(super) fn at(template: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
    let address = match template.addr() {
        ConnectionAddr::TcpTls {
            insecure, tls_params, ..
        } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    template.clone().set_addr(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "tokio-rustls-comp")]
    #[test]
    fn a_node_is_connected_to_with_the_encryption_of_the_template() {
        for (url, is_encrypted) in [("redis://a:1", false), ("rediss://a:1", true)] {
            let template = parse(url.to_owned()).expect("a good URL");
            let node = at(&template, "b".to_owned(), 2);
            assert_eq!(node.addr().to_string(), "b:2");
            assert_eq!(matches!(node.addr(), ConnectionAddr::TcpTls { .. }), is_encrypted);
        }
    }
}
