use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use mlua::{Error, Function, Lua, MultiValue, Value as LuaValue};
use redis::{Cmd, Connection, ConnectionLike, ServerError, Value};

use super::Redis;

/// A server that runs scripts as Dragonfly does, in Lua 5.4: integers are a type of their own there, and `TIME` replies with them.
///
/// Everything else, the commands of scripts included, is done by a Redis.
pub(crate) struct Lua54 {
    port: u16,
}

/// What Redis and Dragonfly add to Lua.
const LIBRARIES: &str = "
    unpack = table.unpack
    struct = {
      pack = function(format, ...) return string.pack(format:gsub('s', 'z'), ...) end,
      unpack = function(format, ...) return string.unpack(format:gsub('s', 'z'), ...) end,
    }
";

impl Lua54 {
    pub(crate) fn start(redis: &Redis) -> Self {
        let client = redis::Client::open(redis.url()).expect("the URL of a Redis");
        let scripts = Arc::new(Mutex::new(Scripts::new(&client)));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        // The thread ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, client, scripts) = (stream.expect("a connection"), client.clone(), scripts.clone());
                thread::spawn(move || {
                    let redis = client.get_connection().expect("the Redis of the test");
                    // It ends when the store closes it.
                    let _ = serve(stream, redis, &scripts);
                });
            }
        });
        Self { port }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

fn serve(stream: TcpStream, mut redis: Connection, scripts: &Mutex<Scripts>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut input, mut output) = (BufReader::new(stream.try_clone()?), stream);
    loop {
        let words = read_command(&mut input)?;
        let name = words[0].to_ascii_uppercase();
        let is_load = name == b"SCRIPT" && words.get(1).is_some_and(|word| word.eq_ignore_ascii_case(b"LOAD"));
        let lock = || scripts.lock().expect("no script panics");
        let reply = match &name[..] {
            b"EVAL" => lock().eval(&words),
            b"EVALSHA" => lock().eval_sha(&words),
            b"SCRIPT" if is_load => Ok(Value::BulkString(lock().load(&words[2]).into_bytes())),
            _ => run(&mut redis, &words),
        };
        let mut bytes = Vec::new();
        write_reply(&mut bytes, &reply);
        output.write_all(&bytes)?;
    }
}

type Reply = Result<Value, String>;

fn run(redis: &mut Connection, words: &[Vec<u8>]) -> Reply {
    let mut command = Cmd::new();
    for word in words {
        command.arg(word);
    }
    match redis.req_command(&command) {
        Ok(Value::ServerError(error)) => Err(text_of(&error)),
        Ok(reply) => Ok(reply),
        Err(error) => Err(match ServerError::try_from(error) {
            Ok(error) => text_of(&error),
            Err(error) => panic!("the Redis of the test does not reply: {error}"),
        }),
    }
}

fn text_of(error: &ServerError) -> String {
    format!("{} {}", error.code(), error.details().unwrap_or_default())
}

/// The scripts that were loaded.
struct Scripts {
    lua: Lua,
    loaded: HashMap<String, Function>,
}

impl Scripts {
    fn new(client: &redis::Client) -> Self {
        let lua = Lua::new();
        let redis = Mutex::new(client.get_connection().expect("the Redis of the test"));
        let call = move |lua: &Lua, words: MultiValue| {
            let words: Vec<_> = words.iter().map(word).collect();
            let reply = run(&mut redis.lock().expect("no command panics"), &words);
            let are_numbers = matches!(&words[0][..], b"TIME" | b"MGET");
            reply
                .map_err(Error::runtime)
                .and_then(|reply| to_lua(lua, &reply, are_numbers))
        };
        let library = lua.create_table().expect("memory");
        library
            .set("call", lua.create_function(call).expect("memory"))
            .expect("memory");
        lua.globals().set("redis", library).expect("memory");
        lua.load(LIBRARIES).exec().expect("the libraries");
        lua.load("redis.pcall = function(...) local fine, reply = pcall(redis.call, ...); return fine and reply or { err = tostring(reply) } end")
            .exec()
            .expect("the libraries");
        Self {
            lua,
            loaded: HashMap::new(),
        }
    }

    /// Loads a script, and returns its hash.
    fn load(&mut self, script: &[u8]) -> String {
        let hash = sha1_smol::Sha1::from(script).hexdigest();
        let function = self
            .lua
            .load(script)
            .into_function()
            .expect("the script is valid in Lua 5.4");
        self.loaded.insert(hash.clone(), function);
        hash
    }

    fn eval(&mut self, words: &[Vec<u8>]) -> Reply {
        let hash = self.load(&words[1]);
        self.run(&hash, &words[2..])
    }

    fn eval_sha(&self, words: &[Vec<u8>]) -> Reply {
        let hash = String::from_utf8_lossy(&words[1]).to_ascii_lowercase();
        match self.loaded.contains_key(&hash) {
            true => self.run(&hash, &words[2..]),
            false => Err("NOSCRIPT No matching script. Please use EVAL.".into()),
        }
    }

    /// Runs a script with the number of its keys, the keys and the arguments.
    fn run(&self, hash: &str, words: &[Vec<u8>]) -> Reply {
        let keys: usize = String::from_utf8_lossy(&words[0]).parse().expect("a number of keys");
        let (keys, arguments) = words[1..].split_at(keys);
        let list = |words: &[Vec<u8>]| {
            let words = words.iter().map(|word| self.lua.create_string(word));
            self.lua.create_sequence_from(words.collect::<Result<Vec<_>, _>>()?)
        };
        let run = || {
            self.lua.globals().set("KEYS", list(keys)?)?;
            self.lua.globals().set("ARGV", list(arguments)?)?;
            self.loaded[hash].call(())
        };
        match run() {
            Ok(reply) => from_lua(&reply),
            Err(error) => Err(format!("ERR {}", error.to_string().replace('\n', " "))),
        }
    }
}

/// An argument of a command, as Dragonfly writes numbers.
fn word(value: &LuaValue) -> Vec<u8> {
    match value {
        LuaValue::Integer(number) => number.to_string().into_bytes(),
        LuaValue::Number(number) => number.to_string().into_bytes(),
        LuaValue::String(text) => text.as_bytes().to_vec(),
        other => panic!("{other:?} is no argument of a command"),
    }
}

fn to_lua(lua: &Lua, reply: &Value, are_numbers: bool) -> mlua::Result<LuaValue> {
    Ok(match reply {
        Value::Nil => LuaValue::Boolean(false),
        Value::Int(number) => LuaValue::Integer(*number),
        Value::BulkString(bytes) if are_numbers => {
            LuaValue::Integer(String::from_utf8_lossy(bytes).parse().map_err(Error::external)?)
        }
        Value::BulkString(bytes) => LuaValue::String(lua.create_string(bytes)?),
        Value::Okay | Value::SimpleString(_) => {
            let table = lua.create_table()?;
            table.set("ok", "OK")?;
            LuaValue::Table(table)
        }
        Value::Array(values) => {
            let values = values.iter().map(|value| to_lua(lua, value, are_numbers));
            LuaValue::Table(lua.create_sequence_from(values.collect::<Result<Vec<_>, _>>()?)?)
        }
        other => panic!("{other:?} is no reply to a command of the script"),
    })
}

fn from_lua(value: &LuaValue) -> Reply {
    Ok(match value {
        LuaValue::Nil | LuaValue::Boolean(false) => Value::Nil,
        LuaValue::Boolean(true) => Value::Int(1),
        LuaValue::Integer(number) => Value::Int(*number),
        LuaValue::Number(number) => Value::Int(*number as i64),
        LuaValue::String(text) => Value::BulkString(text.as_bytes().to_vec()),
        LuaValue::Table(table) => {
            if let Some(error) = table.get::<Option<String>>("err").expect("a table") {
                return Err(error);
            }
            let values = table.sequence_values().map(|value| from_lua(&value.expect("a value")));
            Value::Array(values.collect::<Result<_, _>>()?)
        }
        other => panic!("{other:?} is no reply"),
    })
}

/// Reads an array of bulk strings (RESP).
fn read_command(input: &mut impl BufRead) -> io::Result<Vec<Vec<u8>>> {
    let words = read_length(input, '*')?;
    (0..words)
        .map(|_| {
            let mut word = vec![0; read_length(input, '$')? + 2];
            input.read_exact(&mut word)?;
            word.truncate(word.len() - 2);
            Ok(word)
        })
        .collect()
}

fn read_length(input: &mut impl BufRead, kind: char) -> io::Result<usize> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    let length = line
        .trim_end()
        .strip_prefix(kind)
        .and_then(|length| length.parse().ok());
    length.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn write_reply(output: &mut Vec<u8>, reply: &Reply) {
    let start = match reply {
        Err(error) => format!("-{error}"),
        Ok(Value::Nil) => "$-1".into(),
        Ok(Value::Int(number)) => format!(":{number}"),
        Ok(Value::Okay) => "+OK".into(),
        Ok(Value::SimpleString(text)) => format!("+{text}"),
        Ok(Value::BulkString(bytes)) => format!("${}", bytes.len()),
        Ok(Value::Array(values)) => format!("*{}", values.len()),
        Ok(Value::Map(pairs)) => format!("%{}", pairs.len()),
        Ok(other) => panic!("{other:?} is no reply to a command of the store"),
    };
    output.extend_from_slice(start.as_bytes());
    output.extend_from_slice(b"\r\n");
    match reply {
        Ok(Value::BulkString(bytes)) => {
            output.extend_from_slice(bytes);
            output.extend_from_slice(b"\r\n");
        }
        Ok(Value::Array(values)) => values.iter().for_each(|value| write_reply(output, &Ok(value.clone()))),
        Ok(Value::Map(pairs)) => {
            let values = pairs.iter().flat_map(|(name, value)| [name, value]);
            values.for_each(|value| write_reply(output, &Ok(value.clone())));
        }
        _ => {}
    }
}
