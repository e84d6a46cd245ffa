// limits
import { readFileSync, watchFile } from "node:fs";
import { rateLimit } from "express-rate-limit";
import { RedisStore } from "rate-limit-redis";
import { createClient } from "redis";
// rest
import express from "express";

// limits
const redis = createClient({ url: process.env.REDIS_URL });
redis.on("error", (error) => console.error("redis", error.message));
await redis.connect();
const read = (file) => {
  const policies = JSON.parse(readFileSync(file, "utf8"));
  for (const name of ["search", "login"]) {
    const { limit, windowMs } = policies[name] ?? {};
    if (!(Number.isInteger(limit) && limit > 0)) {
      throw new Error(`${name}: limit must be a positive integer`);
    }
    if (!(Number.isInteger(windowMs) && windowMs > 0)) {
      throw new Error(`${name}: windowMs must be a positive integer`);
    }
  }
  return policies;
};
let policies = read(process.env.LIMITS);
const reload = () => {
  try {
    policies = read(process.env.LIMITS);
  } catch (error) {
    console.error("limits not reloaded:", error.message);
  }
};
watchFile(process.env.LIMITS, { interval: 5_000 }, reload);
const limit = (name) =>
  rateLimit({
    windowMs: policies[name].windowMs, // fixed until the next start
    limit: () => policies[name].limit,
    standardHeaders: "draft-8",
    legacyHeaders: false,
    identifier: name,
    store: new RedisStore({
      prefix: `rl:${name}:`,
      sendCommand: (...args) => redis.sendCommand(args),
    }),
  });
// rest

const app = express();
const done = (req, res) => res.send("done\n");
app.get("/search", limit("search"), done); // limits
app.post("/login", limit("login"), done); // limits
app.listen(process.env.PORT, "127.0.0.1");
