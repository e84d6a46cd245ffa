use std::time::Duration;

use super::{
    acl::Refusal, call::ScriptCall, client::RedisClient, deadline::Deadline, failure::Failure, key_format::KeyFormat,
    script::Script,
};

/// The deadline of a trial, in which Redis may have to compile the script.
const TRIAL_DEADLINE: Duration = Duration::from_secs(1);

/// Runs each command of the script on each primary. Of several failures it returns a refusal first.
pub(super) async fn run_trial(
    client: &RedisClient,
    script: &'static Script,
    key_format: &KeyFormat,
) -> Result<(), Failure> {
    let mut tried = Ok(());
    for tag in client.hash_tags()? {
        match run_trial_at(client, script, key_format, &tag).await {
            Err(refused @ Failure::Forbidden(_)) => return Err(refused),
            other => tried = tried.and(other),
        }
    }
    tried
}

async fn run_trial_at(
    client: &RedisClient,
    script: &'static Script,
    key_format: &KeyFormat,
    tag: &str,
) -> Result<(), Failure> {
    let call = ScriptCall::trial(key_format.trial_key(tag));
    let reply = client.run(script, &call, Deadline::new(TRIAL_DEADLINE)).await;
    let reply = reply.map_err(|failure| match failure {
        Failure::Forbidden(refusal) => Failure::Forbidden(refusal.before_the_commands()),
        failure => failure,
    })?;

    let [command, error] = &*reply.errors else {
        return Ok(());
    };
    Err(match Refusal::of_trial(command, error) {
        Some(refusal) => Failure::Forbidden(refusal),
        None => Failure::Refused(error.clone()),
    })
}
