#[path = "app.rs"]
mod app;
mod webhooks;
