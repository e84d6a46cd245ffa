// limits
import { ipKeyGenerator, rateLimit } from "express-rate-limit";
import { RedisStore } from "rate-limit-redis";
import { createClient } from "redis";
// rest
import express from "express";

// limits
const redis = createClient({ url: process.env.REDIS_URL });
redis.on("error", (error) => console.error("redis", error.message));
await redis.connect();
const limit = (name, options) =>
  rateLimit({
    standardHeaders: "draft-8",
    legacyHeaders: false,
    identifier: name,
    store: new RedisStore({
      prefix: `rl:${name}:`,
      sendCommand: (...args) => redis.sendCommand(args),
    }),
    ...options,
  });
const api = limit("api", {
  windowMs: 60_000,
  limit: (req) => (req.user.plan === "pro" ? 1000 : 100),
  keyGenerator: (req) => req.user.id,
});
const logins = limit("logins", {
  windowMs: 15 * 60_000,
  limit: 5,
  keyGenerator: (req) => `${req.body.account}|${ipKeyGenerator(req.ip)}`,
  skipSuccessfulRequests: true,
});
// rest

const authenticate = (req, res, next) => {
  const [plan, id] = (req.get("authorization") ?? "").replace("Bearer ", "").split("-");
  if (!id) return res.sendStatus(401);
  req.user = { id, plan };
  next();
};

const app = express();
app.use(express.json());
const search = (req, res) => res.send("results\n");
const login = (req, res) => res.sendStatus(req.body.password === "right" ? 200 : 401);
app.get("/search", authenticate, api, search); // limits
app.post("/login", logins, login); // limits
app.listen(process.env.PORT, "127.0.0.1");
